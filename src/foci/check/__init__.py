"""Conformance of any Spec, operator, attention processor or parallel attention: ours or a user's."""
