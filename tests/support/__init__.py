"""What tests share: oracles, and a simulated GPU.

A test of an oracle stands beside the tests that trust it, in a file of theirs: ``tests/ops/test_accuracy.py`` tests
``exact``, ``tests/gpu/test_simulated.py`` the simulated GPU.
"""
