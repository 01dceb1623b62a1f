"""The attach of a replica: arguments and models are compared, groups opened, slots filled."""
