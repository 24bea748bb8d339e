"""Import this for the registry to be full."""

from tests.reliability import faults_ours, faults_outside, faults_users
from tests.reliability.registry import FAULTS

__all__ = ["FAULTS", "faults_ours", "faults_outside", "faults_users"]
