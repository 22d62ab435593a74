//go:build !fleetnext

package link

// Send sends a message. A message that is not urgent may wait up to Linger for other
// frames. The error is ErrSize or the reason why the connection has ended.
func (c *Conn) Send(kind uint8, payload []byte, urgent bool) error {
	return c.put(message, kind, 0, payload, urgent)
}
