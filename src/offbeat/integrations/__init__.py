"""Methods inside programs that others have written."""
