package device

import (
	"context"
	"fmt"
	"net"
	"sync"

	"drover.io/drover/api"
)

// client talks to the holder, one ask at a time.
type client struct {
	mu  sync.Mutex
	c   *net.UnixConn
	buf []byte
}

func dialHolder(ctx context.Context, socket string) (*client, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "the holder at %s cannot be reached: %w; is `drover hold` running?",
			socket, err)
	}
	return &client{c: c.(*net.UnixConn), buf: make([]byte, 4096)}, nil
}

func (c *client) ask(a ask, send []int) (answer, []int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := transmit(c.c, a, send); err != nil {
		return answer{}, nil, fmt.Errorf("ask the holder: %w", err)
	}
	var out answer
	fds, err := receive(c.c, &c.buf, &out)
	if err != nil {
		closeFds(fds)
		return answer{}, nil, fmt.Errorf("the holder's answer: %w", err)
	}
	if out.Err != "" {
		return answer{}, nil, api.Errorf(out.Kind, "%s", out.Err)
	}
	return out, fds, nil
}

func (c *client) hello() (int64, error) {
	out, _, err := c.ask(ask{Op: askHello}, nil)
	return out.Incarnation, err
}

func (c *client) put(key string, blob []byte, fds ...int) error {
	if len(blob) > maxBlob {
		return api.Errorf(api.OutOfRange, "%d bytes to keep for %s; at most %d", len(blob), key, maxBlob)
	}
	_, _, err := c.ask(ask{Op: askPut, Key: key, Blob: blob}, fds)
	return err
}

func (c *client) get(key string) (blob []byte, fds []int, err error) {
	out, fds, err := c.ask(ask{Op: askGet, Key: key}, nil)
	return out.Blob, fds, err
}

func (c *client) delete(key string) error {
	_, _, err := c.ask(ask{Op: askDelete, Key: key}, nil)
	return err
}

func (c *client) keys() (keys []string, err error) {
	for more, after := true, ""; more; {
		out, _, err := c.ask(ask{Op: askList, After: after}, nil)
		if err != nil {
			return nil, err
		}
		keys = append(keys, out.Keys...)
		if more = out.More; more {
			after = out.Keys[len(out.Keys)-1]
		}
	}
	return keys, nil
}

func (c *client) close() error { return c.c.Close() }
