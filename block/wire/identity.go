package wire

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"drover.io/drover/block/authority"
	"drover.io/drover/block/listener"
)

// Identity proves to other nodes that a process belongs to its node. The identity lives in a folder, so that the
// processes of a node share it and know it before the API answers: node.key is made once; one process gets node.pem
// (the certificate, and the authorities for checking other nodes' certificates) issued and writes the file. All other
// processes read a changed node.pem again at the next handshake.
type Identity struct {
	dir, node string
	key       *ecdsa.PrivateKey

	mu   sync.Mutex
	seen fs.FileInfo // of node.pem when read
	now  *credentials
}

// credentials are one reading of node.pem.
type credentials struct {
	cert  tls.Certificate
	roots *x509.CertPool
	leaf  *x509.Certificate
}

const (
	keyFile  = "node.key"
	certFile = "node.pem"
)

// ErrNoCertificate is returned while the node has no certificate.
var ErrNoCertificate = errors.New("the node has no certificate yet: the controller issues one")

// OpenIdentity opens or makes the identity of a node in dir.
func OpenIdentity(dir, node string) (*Identity, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("identity of node %s: %w", node, err)
	}
	id := &Identity{dir: dir, node: node}
	path := filepath.Join(dir, keyFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if b, err = newKey(path); errors.Is(err, fs.ErrExist) {
			b, err = os.ReadFile(path) // another process was first
		}
	}
	if err == nil {
		if block, _ := pem.Decode(b); block == nil {
			err = errors.New("the file holds no PEM")
		} else {
			id.key, err = x509.ParseECPrivateKey(block.Bytes)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("key of node %s, %s: %w; delete the file to get a new one", node, path, err)
	}
	return id, nil
}

// newKey makes a key. The file appears whole or not at all, and never replaces another.
func newKey(path string) ([]byte, error) {
	key, err := authority.NewKey()
	if err != nil {
		return nil, err
	}
	b, err := authority.KeyPEM(key)
	if err != nil {
		return nil, err
	}
	tmp, err := writeTemp(path, b)
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(tmp) }()
	return b, os.Link(tmp, path)
}

// writeTemp writes b durably to a file beside path, readable by the owner alone.
func writeTemp(path string, b []byte) (string, error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return "", err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		_ = os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

// Node is the name of the identity's node.
func (id *Identity) Node() string { return id.node }

// Fingerprint names the key.
func (id *Identity) Fingerprint() string { return fingerprint(id.key) }

// Request asks an authority for a certificate (PEM).
func (id *Identity) Request() ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{Subject: pkix.Name{CommonName: id.node}}, id.key)
	if err != nil {
		return nil, fmt.Errorf("request of node %s: %w", id.node, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), nil
}

// Put takes a certificate for this identity's key, and the authorities (PEM).
func (id *Identity) Put(cert, authorities []byte) error {
	both := append(append([]byte{}, cert...), authorities...)
	if _, err := id.parsePEM(both); err != nil {
		return fmt.Errorf("certificate of node %s: %w", id.node, err)
	}
	path := filepath.Join(id.dir, certFile)
	tmp, err := writeTemp(path, both)
	if err == nil {
		if err = os.Rename(tmp, path); err != nil {
			_ = os.Remove(tmp)
		}
	}
	if err != nil {
		return fmt.Errorf("certificate of node %s: %w", id.node, err)
	}
	return nil
}

// Until is how long the certificate is valid; ErrNoCertificate while there is none.
func (id *Identity) Until() (time.Time, error) {
	c, err := id.currentCredentials()
	if err != nil {
		return time.Time{}, err
	}
	return c.leaf.NotAfter, nil
}

// parsePEM reads node.pem: the first certificate is the node's, the others are authorities.
func (id *Identity) parsePEM(b []byte) (*credentials, error) {
	c := &credentials{roots: x509.NewCertPool()}
	roots := 0
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		if c.leaf == nil {
			c.leaf, c.cert = cert, tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: id.key, Leaf: cert}
			continue
		}
		c.roots.AddCert(cert)
		roots++
	}
	switch {
	case c.leaf == nil || roots == 0:
		return nil, errors.New("the PEM has no certificate of the node, or no authority")
	case !id.key.PublicKey.Equal(c.leaf.PublicKey):
		return nil, errors.New("the certificate is for another key")
	}
	node, err := nodeOf(c.leaf)
	if err == nil && node != id.node {
		err = fmt.Errorf("the certificate is one of node %q", node)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// currentCredentials returns the content of node.pem now.
func (id *Identity) currentCredentials() (*credentials, error) {
	path := filepath.Join(id.dir, certFile)
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNoCertificate
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	if err == nil && id.now != nil && os.SameFile(st, id.seen) && st.ModTime().Equal(id.seen.ModTime()) {
		return id.now, nil
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(path)
	}
	var c *credentials
	if err == nil {
		c, err = id.parsePEM(b)
	}
	if err != nil {
		if id.now != nil {
			return id.now, nil // an older valid certificate is better than nothing
		}
		return nil, fmt.Errorf("certificate of node %s, %s: %w", id.node, path, err)
	}
	id.now, id.seen = c, st
	return c, nil
}

// Server is the configuration of a listener: only nodes of the same authority connect, by TLS 1.3. NodeOf names the
// node.
func (id *Identity) Server(protocols ...string) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(hello *tls.ClientHelloInfo) (
		*tls.Config, error) {
		c, err := id.currentCredentials()
		if err != nil {
			return nil, err
		}
		return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{c.cert}, ClientCAs: c.roots,
			ClientAuth: tls.RequireAndVerifyClientCert, NextProtos: protocols,
			VerifyConnection: func(s tls.ConnectionState) error {
				node, err := NodeOf(s)
				if err == nil {
					err = listener.Identify(hello.Conn, "node "+node)
				}
				return err
			},
			// A resumed session would outlive the certificate of its first handshake.
			SessionTicketsDisabled: true}, nil
	}}
}

// Client is the configuration of a connection to a node: only that node may answer. Callers call Client for every
// connection, since certificates change.
func (id *Identity) Client(node string, protocols ...string) (*tls.Config, error) {
	c, err := id.currentCredentials()
	if err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{c.cert}, NextProtos: protocols,
		// Nodes are known by their names in Drover, at any address: VerifyConnection makes the check that Go then
		// skips.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 {
				return errors.New("the other side has no certificate")
			}
			leaf := s.PeerCertificates[0]
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: c.roots,
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
				return err
			}
			switch is, err := nodeOf(leaf); {
			case err != nil:
				return err
			case is != node:
				return fmt.Errorf("node %s answers at the address of node %s", is, node)
			}
			return nil
		}}, nil
}

// NodeOf is the node at the other end of a connection that Server's configuration accepted.
func NodeOf(s tls.ConnectionState) (string, error) {
	if len(s.PeerCertificates) == 0 {
		return "", errors.New("the other side has no certificate")
	}
	return nodeOf(s.PeerCertificates[0])
}
