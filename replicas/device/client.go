package device

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"drover.io/drover/api"
)

// client talks to the holder, one ask at a time. The client remembers the data that the holder keeps for this
// process: the successor of a dead holder knows nothing, and gets all data again.
type client struct {
	socket string

	mu     sync.Mutex
	c      *net.UnixConn
	buf    []byte
	number int64           // the incarnation from beginIncarnation
	mine   map[string]held // the descriptors are copies
	closed bool

	watched *net.UnixConn // ends with the holder; nil without watchHolder
	ended   chan struct{} // the goroutine of watchHolder has returned
}

// reachTime bounds one try to reach the holder.
const reachTime = 2 * time.Second

func dialHolder(ctx context.Context, socket string) (*client, error) {
	conn, err := reachHolder(ctx, socket)
	if err != nil {
		return nil, err
	}
	return &client{socket: socket, c: conn, buf: make([]byte, 4096), mine: map[string]held{}}, nil
}

func reachHolder(ctx context.Context, socket string) (*net.UnixConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "the holder at %s cannot be reached: %w; is `drover hold` running?",
			socket, err)
	}
	return c.(*net.UnixConn), nil
}

func (c *client) askHolder(a ask, send []int) (answer, []int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out, fds, err := askOnce(c.c, &c.buf, a, send)
	if err != nil && !c.closed && c.reconnect() == nil { // every ask can be repeated
		out, fds, err = askOnce(c.c, &c.buf, a, send)
	}
	if err != nil {
		return answer{}, nil, err
	}
	if out.Err != "" {
		return answer{}, nil, api.Errorf(out.Kind, "%s", out.Err)
	}
	return out, fds, nil
}

// askOnce sends one ask and receives the answer; an error is a failure of the connection.
func askOnce(conn *net.UnixConn, buf *[]byte, a ask, send []int) (out answer, fds []int, err error) {
	if err := sendMessage(conn, a, send); err != nil {
		return out, nil, fmt.Errorf("ask the holder: %w", err)
	}
	if fds, err = receiveMessage(conn, buf, &out); err != nil {
		closeFds(fds)
		return out, nil, fmt.Errorf("the holder's answer: %w", err)
	}
	return out, fds, nil
}

// reconnect connects to the next holder and hands over the data of this process. The caller has mu.
func (c *client) reconnect() error {
	ctx, cancel := context.WithTimeout(context.Background(), reachTime)
	defer cancel()
	conn, err := reachHolder(ctx, c.socket)
	if err != nil {
		return err
	}
	give := []ask{{Op: askHello, Least: c.number}} // the next process must have a higher number
	fds := [][]int{nil}
	for key, h := range c.mine {
		give, fds = append(give, ask{Op: askPut, Key: key, Blob: h.blob}), append(fds, h.fds)
	}
	for i, a := range give {
		out, _, err := askOnce(conn, &c.buf, a, fds[i])
		if err == nil && out.Err != "" {
			err = api.Errorf(out.Kind, "%s", out.Err)
		}
		if err != nil {
			_ = conn.Close()
			return err
		}
	}
	_ = c.c.Close()
	c.c = conn
	return nil
}

// watchHolder hands a dead holder's data to the next holder at once, until close. One goroutine, which close waits for.
func (c *client) watchHolder(log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(context.Background(), reachTime)
	defer cancel()
	conn, err := reachHolder(ctx, c.socket)
	if err != nil {
		return err
	}
	c.watched, c.ended = conn, make(chan struct{})
	go func() {
		defer close(c.ended)
		for {
			_, _ = packetSize(conn) // the holder never sends here: the holder or this client has ended
			_ = conn.Close()
			for conn = nil; conn == nil; {
				var stop bool
				if conn, stop = c.connectSuccessor(log); stop {
					return
				}
			}
		}
	}()
	return nil
}

// connectSuccessor tries to connect to the holder's successor; stop says that the client was closed.
func (c *client) connectSuccessor(log *slog.Logger) (conn *net.UnixConn, stop bool) {
	ctx, cancel := context.WithTimeout(context.Background(), reachTime)
	defer cancel()
	conn, err := reachHolder(ctx, c.socket)
	c.mu.Lock()
	if c.closed {
		stop = true
	} else if err == nil {
		err = c.reconnect()
	}
	if stop || err != nil {
		c.mu.Unlock()
		if conn != nil {
			_ = conn.Close()
		}
		if !stop {
			<-time.After(reconnectPause)
		}
		return nil, stop
	}
	c.watched = conn
	n := len(c.mine)
	c.mu.Unlock()
	log.Warn("the holder died; the next one has the devices' descriptors again", "devices", n)
	return conn, false
}

// reconnectPause is the pause between two tries to find the holder's successor.
const reconnectPause = 50 * time.Millisecond

// rememberRecord copies the data that the holder keeps for this process; without fds, only the blob has changed.
func (c *client) rememberRecord(key string, blob []byte, fds ...int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.mine[key]
	if len(fds) > 0 {
		copies, err := duplicateFds(fds)
		if err != nil {
			return fmt.Errorf("descriptors of %s: %w", key, err)
		}
		closeFds(h.fds)
		h.fds = copies
	}
	if h.blob = blob; len(h.fds) > 0 {
		c.mine[key] = h
	}
	return nil
}

// closeCopies closes this process's copies; the holder keeps its own.
func (c *client) closeCopies(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	closeFds(c.mine[key].fds)
	delete(c.mine, key)
}

func (c *client) beginIncarnation() (int64, error) {
	out, _, err := c.askHolder(ask{Op: askHello}, nil)
	if err == nil {
		c.mu.Lock()
		c.number = out.Incarnation
		c.mu.Unlock()
	}
	return out.Incarnation, err
}

func (c *client) putRecord(key string, blob []byte, fds ...int) error {
	if len(blob) > maxBlob {
		return api.Errorf(api.OutOfRange, "the record of device %s has %d bytes, more than %d", key, len(blob), maxBlob)
	}
	if _, _, err := c.askHolder(ask{Op: askPut, Key: key, Blob: blob}, fds); err != nil {
		return err
	}
	return c.rememberRecord(key, blob, fds...)
}

func (c *client) getRecord(key string) (blob []byte, fds []int, err error) {
	out, fds, err := c.askHolder(ask{Op: askGet, Key: key}, nil)
	return out.Blob, fds, err
}

func (c *client) deleteRecord(key string) error {
	c.closeCopies(key)
	_, _, err := c.askHolder(ask{Op: askDelete, Key: key}, nil)
	return err
}

func (c *client) listKeys() (keys []string, err error) {
	for more, after := true, ""; more; {
		out, _, err := c.askHolder(ask{Op: askList, After: after}, nil)
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

func (c *client) close() error {
	c.mu.Lock()
	c.closed = true
	err := c.c.Close()
	for key, h := range c.mine {
		closeFds(h.fds)
		delete(c.mine, key)
	}
	if c.watched != nil {
		_ = c.watched.CloseRead() // ends the read, and leaves the closing to watchHolder
	}
	c.mu.Unlock()
	if c.ended != nil {
		<-c.ended
	}
	return err
}
