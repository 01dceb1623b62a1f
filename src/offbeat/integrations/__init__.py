"""Methods inside training loops of other libraries: one file a host."""
