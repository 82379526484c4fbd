package authority

import (
	"bytes"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"testing"
	"time"
)

func load(t *testing.T, name string) *Authority {
	t.Helper()
	both, err := New(name)
	if err != nil {
		t.Fatal(err)
	}
	a, err := Load(both)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// sign signs a server's certificate.
func sign(t *testing.T, a *Authority, until time.Time) *x509.Certificate {
	t.Helper()
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := a.Sign(key.Public(), x509.Certificate{Subject: pkix.Name{CommonName: "server"}, DNSNames: []string{"here"},
		NotAfter: until, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(cert)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCertificatesAreTrustedByTheirAuthorityAlone(t *testing.T) {
	one, other := load(t, "one"), load(t, "other")
	c := sign(t, one, time.Now().Add(time.Hour))
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(one.PEM()) {
		t.Fatal("the authority's PEM has no certificate")
	}
	if _, err := c.Verify(x509.VerifyOptions{Roots: roots, DNSName: "here"}); err != nil {
		t.Errorf("a certificate of the authority: %v", err)
	}
	if _, err := c.Verify(x509.VerifyOptions{Roots: roots, DNSName: "there"}); err == nil {
		t.Error("a certificate serves a name that it does not have")
	}
	if late := (x509.VerifyOptions{Roots: roots, CurrentTime: time.Now().Add(2 * time.Hour)}); true {
		if _, err := c.Verify(late); err == nil {
			t.Error("a certificate serves after its end")
		}
	}
	if !one.Signed(c) || other.Signed(c) {
		t.Errorf("signed by its authority: %v, by another: %v", one.Signed(c), other.Signed(c))
	}
	if c.NotBefore.After(time.Now().Add(-backdate / 2)) {
		t.Error("a machine whose clock is slow refuses the certificate")
	}
	if one.cert.SerialNumber.Cmp(c.SerialNumber) == 0 || c.IsCA {
		t.Error("a certificate passes as its authority")
	}
}

func TestSignedCertificateSignsNoOther(t *testing.T) {
	a := load(t, "one")
	if c := a.cert; !c.IsCA || !c.MaxPathLenZero || c.MaxPathLen != 0 {
		t.Errorf("the authority may have authorities below: %v %v %d", c.IsCA, c.MaxPathLenZero, c.MaxPathLen)
	}
}

func TestLoadRefusesDamage(t *testing.T) {
	one, err := New("one")
	if err != nil {
		t.Fatal(err)
	}
	other, err := New("other")
	if err != nil {
		t.Fatal(err)
	}
	cut := bytes.Index(one, []byte("-----BEGIN EC"))
	cutOther := bytes.Index(other, []byte("-----BEGIN EC"))
	for name, b := range map[string][]byte{
		"nothing":             nil,
		"no key":              one[:cut],
		"no certificate":      one[cut:],
		"the key of another":  append(bytes.Clone(one[:cut]), other[cutOther:]...),
		"a broken DER":        bytes.Replace(one, []byte("MII"), []byte("AAA"), 1),
		"a certificate alone": append(bytes.Clone(one[:cut]), other[:cutOther]...),
	} {
		if _, err := Load(b); err == nil {
			t.Errorf("%s: an authority is loaded", name)
		}
	}
	if _, err := Load(one); err != nil {
		t.Error(err)
	}
}
