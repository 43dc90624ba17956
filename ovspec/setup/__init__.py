"""Everything around generation: engine choice, probing, profiles, tuning, manifests, access to the export package."""
