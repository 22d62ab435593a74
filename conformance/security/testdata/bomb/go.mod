module bomb

go 1.24
