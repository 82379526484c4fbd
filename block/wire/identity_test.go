package wire

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// issued is an identity with a certificate of an authority.
func issued(t *testing.T, a *Authority, node string) *Identity {
	t.Helper()
	id, err := OpenIdentity(t.TempDir(), node)
	if err != nil {
		t.Fatal(err)
	}
	issue(t, a, id, node)
	return id
}

func issue(t *testing.T, a *Authority, id *Identity, node string) {
	t.Helper()
	req, err := id.Request()
	if err != nil {
		t.Fatal(err)
	}
	cert, _, err := a.Sign(req, node, CertificateLife)
	if err != nil {
		t.Fatal(err)
	}
	if err := id.Put(cert, a.PEM()); err != nil {
		t.Fatal(err)
	}
}

func testAuthority(t *testing.T) *Authority {
	t.Helper()
	b, err := NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	a, err := LoadAuthority(b)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// meet connects two configurations. It returns the node seen by the server, and the errors of server and client.
func meet(t *testing.T, server *tls.Config, client *tls.Config) (seen string, serverErr, clientErr error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			serverErr = err
			return
		}
		defer c.Close()
		s := tls.Server(c, server)
		if serverErr = s.Handshake(); serverErr == nil {
			seen, serverErr = NodeOf(s.ConnectionState())
			_, _ = s.Write([]byte("x"))
		}
	}()
	c, err := tls.Dial("tcp", ln.Addr().String(), client)
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1)) // TLS 1.3: a client learns of a refusal when it reads
		_ = c.Close()
	}
	<-done
	return seen, serverErr, err
}

func client(t *testing.T, id *Identity, node string) *tls.Config {
	t.Helper()
	c, err := id.Client(node)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestNodesKnowEachOther(t *testing.T) {
	a := testAuthority(t)
	one, two := issued(t, a, "one"), issued(t, a, "two")
	if seen, err1, err2 := meet(t, one.Server(), client(t, two, "one")); seen != "two" || errors.Join(err1, err2) != nil {
		t.Errorf("the server sees %q: %v, %v", seen, err1, err2)
	}
	if _, _, err := meet(t, one.Server(), client(t, two, "three")); err == nil ||
		!strings.Contains(err.Error(), "node one answers at the address of node three") {
		t.Errorf("a client that wants another node: %v", err)
	}
	stranger := issued(t, testAuthority(t), "two")
	if _, err, _ := meet(t, one.Server(), client(t, stranger, "one")); err == nil {
		t.Error("a server takes a node of another authority")
	}
	if _, _, err := meet(t, stranger.Server(), client(t, two, "two")); err == nil {
		t.Error("a client believes a node of another authority")
	}
	if _, err, _ := meet(t, one.Server(), &tls.Config{InsecureSkipVerify: true}); err == nil {
		t.Error("a server takes a client without a certificate")
	}
}

func TestIdentityIsShared(t *testing.T) {
	a, dir := testAuthority(t), t.TempDir()
	one, err := OpenIdentity(dir, "one")
	if err != nil {
		t.Fatal(err)
	}
	again, err := OpenIdentity(dir, "one")
	if err != nil || again.Fingerprint() != one.Fingerprint() {
		t.Fatalf("the second opening has another key: %v", err)
	}
	if _, err := again.Client("two"); !errors.Is(err, ErrNoCertificate) {
		t.Errorf("without a certificate: %v", err)
	}
	issue(t, a, one, "one")
	first, err := again.Until()
	if err != nil {
		t.Fatalf("the other process does not see the certificate: %v", err)
	}
	req, err := one.Request()
	if err != nil {
		t.Fatal(err)
	}
	cert, _, err := a.Sign(req, "one", 2*CertificateLife)
	if err != nil {
		t.Fatal(err)
	}
	if err := one.Put(cert, a.PEM()); err != nil {
		t.Fatal(err)
	}
	if renewed, err := again.Until(); err != nil || !renewed.After(first) {
		t.Errorf("a renewed certificate is not seen: %v, %v", renewed, err)
	}
	other, err := OpenIdentity(t.TempDir(), "one")
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Put(cert, a.PEM()); err == nil {
		t.Error("a certificate for another key is taken")
	}
	expired, _, err := a.Sign(req, "one", -time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := one.Put(expired, a.PEM()); err != nil {
		t.Fatal(err)
	}
	two := issued(t, a, "two")
	if _, _, err := meet(t, one.Server(), client(t, two, "one")); err == nil {
		t.Error("a client believes a certificate that has expired")
	}
}
