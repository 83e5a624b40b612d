"""unitymas.trainers"""
