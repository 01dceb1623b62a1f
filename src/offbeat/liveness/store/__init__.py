"""The client of the store, through which the processes of a run know of each other."""
