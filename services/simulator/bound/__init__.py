"""The number of requests that no scheduler could exceed: what each one costs at least, and how many of them fit."""
