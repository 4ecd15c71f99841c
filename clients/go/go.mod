module fencepost.example/smoke

go 1.19

require fencepost.example/client v0.0.0

replace fencepost.example/client => ../../target/clients/go
