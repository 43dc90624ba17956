"""What happens around generating: engine choice, probing, profiles, tuning, manifests, the door to the export."""
