"""The run that a process takes part in: its store, its token, its members."""
