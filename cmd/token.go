package cmd

import (
	"context"
	"net"
	"time"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/admintoken"
)

// restoreEvery is how often the file of the admin token is looked for.
const restoreEvery = time.Minute

// adminToken is the token of the admin address: the configured one, or else one that
// this process makes. The zero value is that of a process without such an address.
func (n *Node) adminToken(configured string, l net.Listener) proxy.AdminToken {
	if configured != "" || l == nil {
		return proxy.AdminToken{Token: configured}
	}
	address := l.Addr().String()
	var err error
	if n.token, err = admintoken.Make(address); err != nil {
		n.log.Warn("no command can use the token of the admin address, which only reads now; admin.token_file sets one", "error", err)
	} else {
		n.log.Info("the token of the admin address was made", "file", admintoken.Path(address))
	}
	return proxy.AdminToken{Token: n.token.Text(), Made: true}
}

// AdminToken is the token that the node has made for its admin address; "" if the
// token is configured.
func (n *Node) AdminToken() string {
	if n.token == nil {
		return ""
	}
	return n.token.Text()
}

// keepToken makes the file of the token again if it is removed, until ctx ends.
func (n *Node) keepToken(ctx context.Context) {
	if n.token == nil {
		return
	}
	var said bool
	for sleep(ctx, restoreEvery) {
		err := n.token.Restore()
		if err != nil && !said {
			n.log.Warn("the file of the admin token cannot be made again", "error", err)
		}
		said = err != nil
	}
}
