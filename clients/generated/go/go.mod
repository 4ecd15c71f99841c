module fencepost.example/smoke

go 1.19

require (
	fencepost.example/client v0.0.0
	gopkg.in/validator.v2 v2.0.0
)

replace fencepost.example/client => ../../../target/clients/go

replace gopkg.in/validator.v2 => ../../../target/clients/validator
