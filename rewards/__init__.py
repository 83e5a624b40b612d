"""unitymas.rewards"""
