package node

import (
	"context"
	"net"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/admintoken"
)

// restoreEvery is how often a node checks that the file of its admin token exists.
const restoreEvery = time.Minute

// openAdminToken returns the token of the admin address l: the configured token, or else a token
// that this process makes. Without an admin address it returns the zero value.
func (n *Node) openAdminToken(configured string, l net.Listener) admin.Token {
	if configured != "" || l == nil {
		return admin.Token{Text: configured}
	}
	address := l.Addr().String()
	var err error
	if n.token, err = admintoken.Make(address); err != nil {
		n.log.Warn("the token of the admin address cannot be stored for commands, so the address only serves reads; admin.token_file sets a token", "error", err)
	} else {
		n.log.Info("the token of the admin address was made", "file", admintoken.Path(address))
	}
	return admin.Token{Text: n.token.Text(), Generated: true}
}

// AdminToken returns the token that the node made for its admin address; "" if a token is
// configured.
func (n *Node) AdminToken() string {
	if n.token == nil {
		return ""
	}
	return n.token.Text()
}

// keepToken writes the file of the token again if the file was removed, until ctx ends.
func (n *Node) keepToken(ctx context.Context) {
	if n.token == nil {
		return
	}
	tick := time.NewTicker(restoreEvery)
	defer tick.Stop()
	var failing bool // an error is logged once in a row
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := n.token.Restore()
		if err != nil && !failing {
			n.log.Warn("the file of the admin token cannot be written again", "error", err)
		}
		failing = err != nil
	}
}
