"""A model that trains together with its copies on other ranks: one file a phase of its life."""
