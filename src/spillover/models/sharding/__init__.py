"""A model split over ranks: what each holds, how it reads it, how they add up."""
