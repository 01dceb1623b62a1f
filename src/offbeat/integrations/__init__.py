"""Methods inside the training loops of other libraries: one file per library."""
