package cmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/admintoken"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// adminTokenVariable is the environment variable with the name of the token's
// file. --token-file has priority.
const adminTokenVariable = "PDPROXY_ADMIN_TOKEN_FILE"

// adminFlags are the flags for an admin address and its token.
type adminFlags struct{ address, tokenFile string }

func (f *adminFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.address, "admin", "127.0.0.1:9090", "admin address of the proxy")
	c.Flags().StringVar(&f.tokenFile, "token-file", "", "file with the admin token (default $"+adminTokenVariable+", else the token file of a proxy of this user on this machine)")
}

// adminTarget is an admin address with the token for it.
type adminTarget struct {
	base  *url.URL
	token string // "": no token
	// missing is the reason why there is no token; nil if there is one, or if
	// the proxy made none.
	missing error
}

// target reads the token from the named file. Without a name, and for a loopback address,
// it reads the token from the file that the proxy has created. It sends such a token only
// to the address in that file, because another address of the same host name may belong
// to another user.
func (f *adminFlags) target() (*adminTarget, error) {
	address := f.address
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	base, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("--admin: %q is not an address", f.address)
	}
	t := &adminTarget{base: base}
	if file := cmp.Or(f.tokenFile, os.Getenv(adminTokenVariable)); file != "" {
		if t.token, err = config.ReadSecret(file); err != nil {
			return nil, fmt.Errorf("the admin token: %w", err)
		}
		return t, nil
	}
	for _, address := range loopbackAddresses(base) {
		token, err := admintoken.Find(address)
		switch {
		case err == nil:
			t.token, t.missing, base.Host = token, nil, address
			return t, nil
		case !errors.Is(err, fs.ErrNotExist):
			t.missing = err
		}
	}
	return t, nil
}

// loopbackAddresses returns the addresses on loopback that a URL may stand for.
func loopbackAddresses(u *url.URL) []string {
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	host := u.Hostname()
	if host == "" || strings.EqualFold(host, "localhost") {
		return []string{net.JoinHostPort("127.0.0.1", port), net.JoinHostPort("::1", port)}
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.IsLoopback() {
		return []string{net.JoinHostPort(ip.String(), port)}
	}
	return nil
}

// get requests an escaped path.
func (t *adminTarget) get(path string) (*http.Response, error) {
	return t.open(context.Background(), path, 10*time.Second)
}

// open requests an escaped path. limit is that of the whole answer; 0: none. It follows no
// redirections, so that no other host receives the token.
func (t *adminTarget) open(ctx context.Context, path string, limit time.Duration) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.base.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	if t.token != "" {
		req.Header.Set("Authorization", "Bearer "+t.token)
	}
	client := http.Client{
		Timeout:       limit,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := client.Do(req)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, fmt.Errorf("no proxy answers at %s: %w; --admin names another admin address", t.base.Host, syscall.ECONNREFUSED)
	}
	if err == nil && resp.StatusCode == http.StatusUnauthorized {
		resp.Body.Close()
		return nil, errors.Join(fmt.Errorf("%s requires another token than the token that was found; name its file by --token-file or $%s", t.base.Host, adminTokenVariable), t.missing)
	}
	return resp, err
}

func (a *app) adminTokenCommand() *cobra.Command {
	var admin adminFlags
	c := &cobra.Command{
		Use:     "admin-token",
		Short:   "Print the token of an admin address, for curl",
		Example: `  curl -X POST -H "Authorization: Bearer $(pdproxy admin-token)" http://127.0.0.1:9090/v1/drain`,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			t, err := admin.target()
			switch {
			case err != nil:
				return err
			case t.token == "":
				return exit.Failed(cmp.Or(t.missing, fmt.Errorf("no proxy of this user serves %s with a token that it has made", t.base.Host)))
			case a.json:
				return exit.Failed(a.printJSON(map[string]string{"token": t.token}))
			}
			_, err = fmt.Fprintln(a.out, t.token)
			return exit.Failed(err)
		},
	}
	admin.add(c)
	return a.addJSON(c)
}
