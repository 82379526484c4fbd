package sftp

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pkg/sftp"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/web"
)

// idleTime is how long a connection stays usable without a check: servers and firewalls close idle ones.
const idleTime = 20 * time.Second

// connection is an SFTP session on an SSH connection of its own.
type connection struct {
	*sftp.Client
	ssh  *ssh.Client
	conn *meteredConn
	used time.Time
}

func (c *connection) close() {
	_ = c.conn.Close() // at once: the others would wait for the server
	_ = c.Client.Close()
	_ = c.ssh.Close()
}

// meteredConn limits what a server sends for one answer, whose memory the library does not limit. Beyond the limit the
// connection is broken.
type meteredConn struct {
	net.Conn
	left atomic.Int64 // what the server may send
}

var errTooLong = errors.New("the answer of the server is too long")

func newMeteredConn(c net.Conn) *meteredConn {
	m := &meteredConn{Conn: c}
	m.left.Store(math.MaxInt64)
	return m
}

// limit runs do, during which the server may send most bytes, and returns how many it sent.
func (c *meteredConn) limit(most int64, do func()) (sent int64, err error) {
	c.left.Store(most)
	do()
	left := c.left.Swap(math.MaxInt64)
	if left <= 0 {
		return most - left, errTooLong
	}
	return most - left, nil
}

// Read implements net.Conn.
func (c *meteredConn) Read(p []byte) (int, error) {
	if c.left.Load() <= 0 {
		return 0, errTooLong
	}
	n, err := c.Conn.Read(p)
	c.left.Add(int64(-n))
	return n, err
}

// operation is one call of the store on a connection, with a deadline.
type operation struct {
	*connection
	*web.Deadline
	store *Store
}

// run runs do on a connection. The error has the kind of its cause, and the name of the store and the action.
func (s *Store) run(ctx context.Context, action string, n int64, do func(*operation) error) error {
	deadline := web.Network{AnswerTime: s.cfg.AnswerTime}.Begin(ctx, n)
	defer deadline.End()
	err := s.runOn(deadline, do)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return api.Errorf(api.Other, "%s: cannot %s: %w", s, action, ctx.Err())
	case deadline.Ctx.Err() != nil:
		return api.Errorf(api.Unavailable, "%s: cannot %s: the server did not answer in time", s, action)
	}
	return api.Errorf(kindOf(err), "%s: cannot %s: %w", s, action, err)
}

func (s *Store) runOn(deadline *web.Deadline, do func(*operation) error) error {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-deadline.Ctx.Done():
		return deadline.Ctx.Err()
	}
	c, err := s.connect(deadline.Ctx)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(deadline.Ctx, func() { _ = c.conn.Close() })
	err = do(&operation{connection: c, Deadline: deadline, store: s})
	if !stop() || isBroken(err) {
		c.close()
		return err
	}
	s.putBack(c)
	return err
}

// putBack keeps a connection for the next operation.
func (s *Store) putBack(c *connection) {
	c.used = time.Now()
	s.mu.Lock()
	closed := s.closed
	if !closed {
		s.idle = append(s.idle, c)
	}
	s.mu.Unlock()
	if closed {
		c.close()
	}
}

// connect returns an idle connection that works, or a new one.
func (s *Store) connect(ctx context.Context) (*connection, error) {
	for {
		s.mu.Lock()
		var c *connection
		if n := len(s.idle); n > 0 {
			c, s.idle = s.idle[n-1], s.idle[:n-1]
		}
		closed := s.closed
		s.mu.Unlock()
		switch {
		case closed:
			return nil, api.Errorf(api.Unavailable, "the store is closed")
		case c == nil:
			return s.dial(ctx)
		case time.Since(c.used) < idleTime || s.answers(ctx, c):
			return c, nil
		}
		c.close()
	}
}

// answers reports whether a connection that was idle still works.
func (s *Store) answers(ctx context.Context, c *connection) bool {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AnswerTime)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = c.conn.Close() })
	defer stop()
	_, err := c.RealPath(".")
	return err == nil
}

// dial makes a connection and logs in.
func (s *Store) dial(ctx context.Context) (*connection, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AnswerTime)
	defer cancel()
	dialed, err := (&net.Dialer{KeepAlive: 30 * time.Second}).DialContext(ctx, "tcp", s.address())
	if err != nil {
		return nil, err
	}
	conn := newMeteredConn(dialed)
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	login := s.login
	shaken, channels, requests, err := ssh.NewClientConn(conn, s.address(), &login)
	if err != nil {
		_ = conn.Close()
		return nil, s.loginError(err)
	}
	client := ssh.NewClient(shaken, channels, requests)
	session, err := sftp.NewClient(client, sftp.UseConcurrentWrites(true))
	if err != nil {
		_ = client.Close()
		return nil, err
	}
	return &connection{Client: session, ssh: client, conn: conn}, nil
}

// loginError is the error of a failed handshake.
func (s *Store) loginError(err error) error {
	var unknown *knownhosts.KeyError
	var revoked *knownhosts.RevokedError
	switch {
	case errors.As(err, &unknown) && len(unknown.Want) == 0:
		return api.Errorf(api.Denied, "the key of the server is not known; write the server's line of ssh-keyscan, after a "+
			"comparison with the server, into %s", api.SecretKnownHosts)
	case errors.As(err, &unknown) || errors.As(err, &revoked):
		return api.Errorf(api.Denied, "the server has another key than %s says; if the server has a new key, correct the "+
			"Secret", api.SecretKnownHosts)
	case strings.Contains(err.Error(), "unable to authenticate"):
		return api.Errorf(api.Denied, "the server refuses the login; check the user, and the password or key")
	}
	return err
}

// clientConfig checks the settings of the login.
func (s *Store) clientConfig() (c ssh.ClientConfig, err error) {
	c = ssh.ClientConfig{User: s.cfg.User, Timeout: s.cfg.AnswerTime}
	if s.cfg.PrivateKey != "" {
		signer, err := s.parseKey()
		if err != nil {
			return c, api.Errorf(api.Invalid, "%s: the private key cannot be read; give an OpenSSH or PEM key, and its "+
				"passphrase if the key has one", s)
		}
		c.Auth = append(c.Auth, ssh.PublicKeys(signer))
	}
	if password := string(s.cfg.Password); password != "" {
		c.Auth = append(c.Auth, ssh.Password(password), ssh.KeyboardInteractive(
			func(_, _ string, questions []string, _ []bool) ([]string, error) {
				return slices.Repeat([]string{password}, len(questions)), nil
			}))
	}
	if len(c.Auth) == 0 {
		return c, api.Errorf(api.Invalid, "%s: neither a password nor a private key; give one of them", s)
	}
	if c.HostKeyCallback, err = knownKeys(s.cfg.KnownHosts); err != nil {
		return c, api.Errorf(api.Invalid, "%s: the lines of known hosts cannot be read; copy them from known_hosts", s)
	}
	if c.HostKeyAlgorithms = algorithms(c.HostKeyCallback, s.address()); len(c.HostKeyAlgorithms) == 0 {
		return c, api.Errorf(api.Invalid, "%s: no known host has this name and port; write the server's line of "+
			"ssh-keyscan, after a comparison with the server", s)
	}
	return c, nil
}

func (s *Store) parseKey() (ssh.Signer, error) {
	if s.cfg.Passphrase != "" {
		return ssh.ParsePrivateKeyWithPassphrase([]byte(s.cfg.PrivateKey), []byte(s.cfg.Passphrase))
	}
	return ssh.ParsePrivateKey([]byte(s.cfg.PrivateKey))
}

// knownKeys makes the check of a server's key from lines of known_hosts, which the library reads from a file.
func knownKeys(lines []byte) (ssh.HostKeyCallback, error) {
	f, err := os.CreateTemp("", "drover-known-hosts-")
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // a file without secrets
	_, err = f.Write(lines)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return knownhosts.New(f.Name())
}

// algorithms are the algorithms of the known keys of an address: else the server may show a key of another kind. The
// callback names the keys when it refuses a foreign one.
func algorithms(check ssh.HostKeyCallback, address string) (all []string) {
	var wanted *knownhosts.KeyError
	if !errors.As(check(address, &net.TCPAddr{IP: net.IPv4zero}, noKey{}), &wanted) {
		return nil
	}
	for _, known := range wanted.Want {
		names := []string{known.Key.Type()}
		if names[0] == ssh.KeyAlgoRSA {
			names = []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
		}
		all = append(all, names...)
	}
	return all
}

// noKey is the key of no server.
type noKey struct{}

func (noKey) Type() string                        { return "none" }
func (noKey) Marshal() []byte                     { return nil }
func (noKey) Verify([]byte, *ssh.Signature) error { return errors.New("no key") }

// isBroken reports whether a connection cannot be used after an error: only an answer of the server leaves it whole.
func isBroken(err error) bool {
	var status *sftp.StatusError
	return err != nil && api.KindOf(err) == api.Other && !errors.As(err, &status) && !errors.Is(err, fs.ErrNotExist) &&
		!errors.Is(err, fs.ErrPermission)
}

// kindOf is the kind of an error. A server's failure without a reason may be a full disk, or pass.
func kindOf(err error) api.Kind {
	if kind := api.KindOf(err); kind != api.Other {
		return kind
	}
	if errors.Is(err, fs.ErrPermission) {
		return api.Denied
	}
	return api.Unavailable
}
