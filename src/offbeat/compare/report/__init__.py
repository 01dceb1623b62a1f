"""What a comparison shows: tables in a terminal, and an HTML report with its charts."""
