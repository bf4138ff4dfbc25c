"""A report in several forms: strings out."""
