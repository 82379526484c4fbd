package cluster

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
)

// TestCertificates: all nodes get new certificates, and then certificates of a new authority, under verified load on
// a volume with three replicas: no I/O fails, and no replica is rebuilt. A node answers no client without a valid
// certificate of the authority.
func TestCertificates(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	l := newLoaded(t, c, "v", 64<<20, 3)
	l.attach(c.Nodes[0])
	awaitVolume(t, c, "v", "healthy", whole)
	l.works(50)
	rebuilds := func() float64 {
		return c.metric(t, c.Nodes[0], `drover_volume_rebuilds_total{kind="full",process="data",volume="v"}`)
	}
	before := rebuilds()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: api.AuthoritySecret}}
	must(t, c.Objects.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
	authority, err := wire.LoadAuthority(secret.Data[api.AuthorityKey])
	must(t, err)

	// A certificate with an hour left is due.
	for _, m := range c.Nodes {
		was, now := certificateOf(t, m), requestOf(t, c, m)
		old := now.DeepCopy()
		soon, until, err := authority.Sign([]byte(now.Spec.Request), m.Name, time.Hour)
		must(t, err)
		now.Status.Certificate, now.Status.NotAfter = string(soon), metav1.NewTime(until)
		must(t, c.Objects.Status().Patch(t.Context(), now, client.MergeFrom(old)))
		eventually(t, m.Name+" has a new certificate", func() bool {
			cert := certificateOf(t, m)
			return cert.SerialNumber.Cmp(was.SerialNumber) != 0 && time.Until(cert.NotAfter) > wire.CertificateLife*2/3
		})
	}
	l.works(50)

	var n api.Node
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: c.Nodes[1].Name}, &n))
	another := newAuthority(t)
	stranger := func(by *wire.Authority, node string, life time.Duration, change func(*tls.Config)) *tls.Config {
		id, err := wire.OpenIdentity(t.TempDir(), node)
		must(t, err)
		request, err := id.Request()
		must(t, err)
		cert, _, err := by.Sign(request, node, life)
		must(t, err)
		must(t, id.Put(cert, authority.PEM()))
		cfg, err := id.Client(n.Name, "drover-peer")
		must(t, err)
		if change != nil {
			change(cfg)
		}
		return cfg
	}
	node := c.Nodes[2].Name
	for _, peer := range []struct {
		what   string
		cfg    *tls.Config
		answer bool
	}{
		{"a node's", stranger(authority, node, time.Hour, nil), true},
		{"one of another node", stranger(authority, c.Nodes[0].Name, time.Hour, nil), false},
		{"one of another authority", stranger(another, node, time.Hour, nil), false},
		{"one that has run out", stranger(authority, node, -time.Minute, nil), false},
		{"none", stranger(authority, node, time.Hour, func(c *tls.Config) { c.Certificates = nil }), false},
		{"TLS 1.2", stranger(authority, node, time.Hour, func(c *tls.Config) {
			c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
		}), false},
		{"no TLS", nil, false},
	} {
		if err := greet(n.Status.DataAddress, node, peer.cfg); (err == nil) != peer.answer {
			t.Errorf("a client with %s: %v", peer.what, err)
		}
	}

	must(t, c.Objects.Delete(t.Context(), secret))
	must(t, c.Objects.Delete(t.Context(), requestOf(t, c, c.Nodes[2])))
	for _, m := range c.Nodes {
		eventually(t, m.Name+" has a certificate of the new authority", func() bool {
			return !signedBy(authority, certificateOf(t, m))
		})
	}
	if err := greet(n.Status.DataAddress, node, stranger(authority, node, time.Hour, nil)); err == nil {
		t.Error("a client with a certificate of the authority that was is answered")
	}
	l.works(50)
	if n := rebuilds() - before; n > 0 {
		t.Errorf("%v replicas were made anew", n)
	}
	kill(t, c.Nodes[1], "data") // the next connections use the new certificates
	l.works(50)
	awaitVolume(t, c, "v", "whole", whole)
	l.halt()
	for _, why := range dropped(t, c, "v") { // a busy machine may drop a member for another reason
		if t.Log(why); strings.Contains(why, "certificate") || strings.Contains(why, "tls") {
			t.Errorf("a replica was dropped: %s", why)
		}
	}
}

func newAuthority(t *testing.T) *wire.Authority {
	t.Helper()
	both, err := wire.NewAuthority()
	must(t, err)
	a, err := wire.LoadAuthority(both)
	must(t, err)
	return a
}

// certificateOf is the present certificate of a machine's processes.
func certificateOf(t *testing.T, m *Machine) *x509.Certificate {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(m.Dir, "state", "pki", "node.pem"))
	must(t, err)
	block, _ := pem.Decode(b)
	if block == nil {
		t.Fatalf("%s has no certificate", m.Name)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	must(t, err)
	return cert
}

// requestOf is the NodeCertificate of a machine.
func requestOf(t *testing.T, c *Cluster, m *Machine) *api.NodeCertificate {
	t.Helper()
	var list api.NodeCertificateList
	must(t, c.Objects.List(t.Context(), &list))
	for i := range list.Items {
		if list.Items[i].Spec.Node == m.Name {
			return &list.Items[i]
		}
	}
	t.Fatalf("%s has no NodeCertificate", m.Name)
	return nil
}

func signedBy(a *wire.Authority, c *x509.Certificate) bool {
	_, ok := a.Signed(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}))
	return ok
}

// greet sends the hello of `docs/replication.md` to a node's data process, and returns nil for a hello in answer.
func greet(address, node string, cfg *tls.Config) error {
	nc, err := net.DialTimeout("tcp", address, time.Minute)
	if err != nil {
		return fmt.Errorf("not even a connection: %w", err)
	}
	defer nc.Close()
	if cfg != nil {
		nc = tls.Client(nc, cfg)
	}
	if err := nc.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	hello, err := json.Marshal(map[string]any{"version": 2, "minVersion": 1, "node": node})
	if err != nil {
		return err
	}
	sum := func(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }
	frame := make([]byte, 48, 48+len(hello))
	frame[0] = 1
	binary.LittleEndian.PutUint32(frame[32:], uint32(len(hello)))
	binary.LittleEndian.PutUint32(frame[36:], sum(hello))
	binary.LittleEndian.PutUint32(frame[44:], sum(frame[:44]))
	if _, err := nc.Write(append(frame, hello...)); err != nil {
		return err
	}
	if _, err := io.ReadFull(nc, frame[:48]); err != nil {
		return err
	}
	answer := make([]byte, binary.LittleEndian.Uint32(frame[32:]))
	if _, err := io.ReadFull(nc, answer); err != nil {
		return err
	}
	var a struct {
		Node  string
		Error *struct{ Message string }
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		return err
	}
	if a.Error != nil {
		return errors.New(a.Error.Message)
	}
	return nil
}
