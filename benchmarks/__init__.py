"""Measurements and device checks of kvray; none of it is installed with the packages."""
