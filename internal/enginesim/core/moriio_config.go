package core

import "time"

// MoRIIOConfig holds the settings of a simulated vLLM engine with the
// MoRIIOConnector. The zero value of a field means its default, which is the
// real engine's unless stated otherwise.
type MoRIIOConfig struct {
	// HandshakePort and NotifyPort are rank 0's ports; rank r adds r. Default:
	// any port.
	HandshakePort, NotifyPort int
	// Register is the address where the engine registers, "tcp://HOST:PORT";
	// empty: no registration.
	Register string
	// OldRegistration registers in the form from before vLLM pull request 39565.
	OldRegistration bool
	// PingInterval is the time between two registrations; default 3 s.
	PingInterval time.Duration
	// TPSize is the tensor-parallel size that the engine announces; default 1.
	TPSize int
	// DeferTimeout is the time that prefill holds blocks without a reader;
	// default 60 s.
	DeferTimeout time.Duration
	// ReceiveTimeout is the time that decode holds blocks without a writer;
	// default 120 s. vLLM 0.32 has that limit (recv_abort_timeout) only in READ
	// mode: in WRITE mode the blocks of a request whose writer failed stay
	// held.
	ReceiveTimeout time.Duration
}

// WithDefaults returns the config with every zero field set.
func (c MoRIIOConfig) withDefaults() MoRIIOConfig {
	for field, def := range map[*time.Duration]time.Duration{
		&c.PingInterval: 3 * time.Second, &c.DeferTimeout: time.Minute, &c.ReceiveTimeout: 2 * time.Minute,
	} {
		if *field == 0 {
			*field = def
		}
	}
	if c.TPSize == 0 {
		c.TPSize = 1
	}
	return c
}
