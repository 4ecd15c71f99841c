module fencepost.example/worker

go 1.19
