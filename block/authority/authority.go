// Package authority owns the keys that sign certificates: the authority of the nodes and the authority of the API
// server each are an Authority. The callers own the certificates' names and uses.
//
// Invariants: an authority's certificate and key are one PEM, so that both always match; an authority signs no other
// authority; a certificate is valid an hour before it was signed, because clocks differ.
//
// The package keeps no state and starts no goroutine.
package authority

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"time"
)

const (
	life     = 30 * 365 * 24 * time.Hour // of an authority
	backdate = time.Hour
)

// Authority signs certificates.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New makes an authority, in the form that Load reads.
func New(name string) ([]byte, error) {
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	t := template(x509.Certificate{Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(life), IsCA: true,
		BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign})
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	keyPEM, err := KeyPEM(key)
	return append(CertPEM(der), keyPEM...), err
}

// Load reads the certificate and the key of an authority from one PEM.
func Load(both []byte) (*Authority, error) {
	a := &Authority{}
	for block, rest := pem.Decode(both); block != nil; block, rest = pem.Decode(rest) {
		var err error
		switch block.Type {
		case "CERTIFICATE":
			a.cert, err = x509.ParseCertificate(block.Bytes)
		case "EC PRIVATE KEY":
			a.key, err = x509.ParseECPrivateKey(block.Bytes)
		}
		if err != nil {
			return nil, err
		}
	}
	switch {
	case a.cert == nil || a.key == nil:
		return nil, errors.New("the PEM has no certificate, or no key")
	case !a.key.PublicKey.Equal(a.cert.PublicKey):
		return nil, errors.New("the key is not that of the certificate")
	}
	return a, nil
}

// PEM is the authority's certificate.
func (a *Authority) PEM() []byte { return CertPEM(a.cert.Raw) }

// Sign makes a certificate (PEM) for a public key. The certificate has the names, the uses and the end of want.
func (a *Authority) Sign(key any, want x509.Certificate) ([]byte, error) {
	want.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template(want), a.cert, key, a.key)
	if err != nil {
		return nil, err
	}
	return CertPEM(der), nil
}

// Signed reports whether this authority signed a certificate.
func (a *Authority) Signed(cert *x509.Certificate) bool {
	return cert.CheckSignatureFrom(a.cert) == nil
}

// template adds what all certificates have.
func template(want x509.Certificate) *x509.Certificate {
	serial := make([]byte, 16)
	_, _ = rand.Read(serial) // never fails
	want.SerialNumber = new(big.Int).SetBytes(bytes.TrimLeft(serial, "\x00"))
	want.NotBefore = time.Now().Add(-backdate)
	return &want
}

// NewKey makes a key of the kind that authorities have and sign: P-256.
func NewKey() (*ecdsa.PrivateKey, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }

// KeyPEM encodes a key.
func KeyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

// CertPEM encodes a certificate.
func CertPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
