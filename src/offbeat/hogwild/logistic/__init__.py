"""Asynchronous logistic regression, a scikit-learn estimator on sparse matrices."""
