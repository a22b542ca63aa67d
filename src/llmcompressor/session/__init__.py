# SPDX-License-Identifier: Apache-2.0
"""The session: lifecycle, active session, and resuming."""
