"""Stochastic Gradient Push and Overlap SGP (Assran et al. 2019): push-sum gossip of models."""
