"""The dependency audit, ``python -m tests.support.audit``: is a vulnerability known in what constraints.txt pins?"""
