"""One model of time for each exchange, beside the equation that it implements."""
