"""What the command-line tools share: quantities as text, terminals, charts and pages."""
