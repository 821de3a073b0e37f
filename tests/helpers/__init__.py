"""Cases, models and checks that several tests share; no tests."""
