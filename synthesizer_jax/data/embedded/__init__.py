MIXTURE = "embedded_co_training"
