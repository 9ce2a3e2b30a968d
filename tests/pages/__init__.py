"""README, the pages of the site, the package."""
