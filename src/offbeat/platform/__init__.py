"""What offbeat uses of torch beyond its documented interface: process groups and devices."""
