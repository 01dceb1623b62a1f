"""What a plan shows: tables in a terminal, and an HTML report."""
