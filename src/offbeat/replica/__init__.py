"""A replica, a model that trains with its copies on other ranks: one file per phase of its life."""
