"""What ``offbeat plan`` asks and reports: profiles of scripts, questions, tables and pages."""
