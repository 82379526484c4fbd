package remote

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
)

// Listen opens a listener for engines of other nodes, with the port of the last time if the port is free.
func Listen(host, state string) (net.Listener, error) {
	port := "0"
	file := filepath.Join(state, "data.port")
	if b, err := os.ReadFile(file); err == nil {
		port = string(b)
	}
	ln, err := wire.Listen(net.JoinHostPort(host, port))
	if err != nil && port != "0" {
		ln, err = wire.Listen(net.JoinHostPort(host, "0"))
	}
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "listen for other nodes at %s: %w", host, err)
	}
	_, port, err = net.SplitHostPort(ln.Addr().String())
	if err == nil {
		err = os.WriteFile(file, []byte(port), 0o600)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", file, err), ln.Close())
	}
	return ln, nil
}
