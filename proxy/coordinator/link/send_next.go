//go:build fleetnext

package link

// Send is the Send of a later version, which has more kinds: a message and a call of unknown kinds
// precede each message, the first ones at the start of the connection. Nothing waits for the
// answer of the call. conformance/fleet builds such a program.
func (c *Conn) Send(kind uint8, payload []byte, urgent bool) error {
	if err := c.put(message, 99, 0, []byte("a message of a later version"), false); err != nil {
		return err
	}
	if err := c.put(call, 98, 1<<31, []byte{0xff, 0xff}, false); err != nil {
		return err
	}
	return c.put(message, kind, 0, payload, urgent)
}
