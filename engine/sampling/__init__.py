"""engine/sampling"""
