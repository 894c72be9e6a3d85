"""What a person sees: tables, pages, progress bars, plots."""
