"""Documents from pre-training and chat data sets."""
