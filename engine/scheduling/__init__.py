"""engine/scheduling"""
