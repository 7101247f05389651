"""Shallow water on a rotating sphere: spectral transforms and tendencies.

The equations in vorticity-divergence form, by the spectral transform method of Hack and Jakob
(1992), NCAR/TN-343+STR, on Gaussian latitudes.
"""

import math

import numpy as np

RADIUS = 6.37122e6
"""Planet radius, m."""
ROTATION = 7.292e-5
"""Angular velocity, rad s-1."""
GRAVITY = 9.80616
"""m s-2."""
MEAN_HEIGHT = 1.0e4
"""Mean height of the free surface, m; gravity waves travel at 313 m s-1."""

# Single precision takes half to two thirds of double's time. At 48 x 96 the states of one run
# differ from double's by 4e-5 of their standard deviation after 5 days and by 2e-4 after 20.
REAL = np.float32
COMPLEX = np.complex64


class Sphere:
    """Spectral transforms and shallow-water tendencies on one grid.

    A spectrum is complex64 (3, order, degree): geopotential less its mean (m2 s-2), vorticity
    and divergence (s-1), in spherical harmonics normalised to a mean square of 1/2 over sin(lat).
    Fields on the grid are float32 (..., lat, lon), lat north to south.
    """

    def __init__(self, num_lat: int, num_lon: int, num_degrees: int) -> None:
        self.num_lon = num_lon
        self.num_degrees = num_degrees
        sine, weight = gauss(num_lat)
        legendre, derivative = _legendre(sine, num_degrees)  # (order, lat, degree)
        order = np.arange(num_degrees)
        laplacian = -order * (order + 1) / RADIUS**2
        # d/dx and cos(lat) d/dy in the plane both carry 1 / (radius * cos(lat)).
        slope = 1 / (RADIUS * np.sqrt(1 - sine**2))[:, None]  # (lat, 1)
        # Tables are made in double precision and rounded once.
        self.area = _rounded(weight / (2 * num_lon))  # (lat,); fraction of the sphere in one cell
        self.coriolis = _rounded(2 * ROTATION * sine[:, None])  # (lat, 1)
        self.slope = _rounded(slope)
        self.synthesis = _rounded(legendre)
        self.synthesis_dy = _rounded(derivative * slope)
        self.analysis = _rounded((legendre * weight[:, None]).swapaxes(1, 2))
        self.analysis_dy = _rounded((derivative * weight[:, None] * slope).swapaxes(1, 2))
        self.d_lon = (1j * order[:, None]).astype(COMPLEX)  # (order, 1)
        self.laplacian = _rounded(laplacian)  # (degree,)
        self.inverse_laplacian = _rounded(1 / np.append(np.inf, laplacian[1:]))

    def to_grid(self, spectrum: np.ndarray) -> np.ndarray:
        """Geopotential less its mean, vorticity, u and v: (4, lat, lon)."""
        geopotential, vorticity, divergence = spectrum
        stream = vorticity * self.inverse_laplacian
        potential = divergence * self.inverse_laplacian
        # u = (d potential/d lon - cos(lat) d stream/d lat) / (radius cos(lat)), and
        # v = (d stream/d lon + cos(lat) d potential/d lat) / (radius cos(lat)).
        along = _apply(
            self.synthesis,
            (geopotential, vorticity, self.d_lon * potential, self.d_lon * stream),
        )
        across = _apply(self.synthesis_dy, (stream, potential))
        along[2:] *= self.slope
        along[2] -= across[0]
        along[3] += across[1]
        return np.fft.irfft(along, self.num_lon, axis=-1, norm="forward")

    def tendency(self, spectrum: np.ndarray) -> np.ndarray:
        """d/dt of a spectrum, without diffusion.

        With A = (vorticity + f) (u, v):  d vorticity / dt = -div A,
        d divergence / dt = curl A - laplacian(geopotential + kinetic energy),
        d geopotential / dt = -div(geopotential (u, v)) - mean geopotential * divergence.
        """
        geopotential, vorticity, u, v = self.to_grid(spectrum)
        absolute = vorticity + self.coriolis
        fields = np.empty((5, *u.shape), REAL)
        np.multiply(absolute, u, out=fields[0])
        np.multiply(absolute, v, out=fields[1])
        np.multiply(geopotential, u, out=fields[2])
        np.multiply(geopotential, v, out=fields[3])
        fields[4] = (u * u + v * v) / 2
        waves = np.fft.rfft(fields, axis=-1, norm="forward")[..., : self.num_degrees]
        across = _apply(self.analysis_dy, tuple(wave.T for wave in waves[:4]))
        waves[:4] *= self.d_lon[:, 0] * self.slope
        along = _apply(self.analysis, tuple(wave.T for wave in waves))
        # Integrated by parts in latitude, hence the signs: div = d_lon x - dy y.
        result = np.empty_like(spectrum)
        along, across = along.swapaxes(1, 2), across.swapaxes(1, 2)
        result[0] = across[3] - along[2] - GRAVITY * MEAN_HEIGHT * spectrum[2]
        result[1] = across[1] - along[0]
        result[2] = along[1] + across[0] - self.laplacian * (along[4] + spectrum[0])
        return result

    def vorticity_of_zonal_wind(self, wind: np.ndarray) -> np.ndarray:
        """Vorticity spectrum (order, degree) of an eastward wind (lat,)."""
        result = np.zeros((self.num_degrees, self.num_degrees), COMPLEX)
        result[0] = self.analysis_dy[0] @ wind
        return result

    def balanced(self, vorticity: np.ndarray) -> np.ndarray:
        """The spectrum with this vorticity, no divergence, and no tendency to gain any.

        The height follows from the nonlinear balance equation. It spares the run a burst of
        gravity waves.
        """
        spectrum = np.zeros((3, *vorticity.shape), COMPLEX)
        spectrum[1] = vorticity
        spectrum[0] = self.inverse_laplacian * self.tendency(spectrum)[2]
        return spectrum


def _apply(table: np.ndarray, fields: tuple[np.ndarray, ...]) -> np.ndarray:
    """One Legendre sum for several fields: table (order, i, j), fields (order, j) complex.

    Returns (field, i, order), a view. The real table meets real and imaginary parts as columns
    of one real product, as fast as numpy gets on such small arrays.
    """
    columns = np.stack(fields, axis=-1, dtype=COMPLEX).view(REAL)  # (order, j, 2 * field)
    return (table @ columns).view(COMPLEX).T


def _rounded(table: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(table, dtype=REAL)


def gauss(num_lat: int) -> tuple[np.ndarray, np.ndarray]:
    """Sines of the Gaussian latitudes, north to south, and their weights (sum 2)."""
    sine, weight = np.polynomial.legendre.leggauss(num_lat)
    return sine[::-1].copy(), weight[::-1].copy()


def _legendre(sine: np.ndarray, num_degrees: int) -> tuple[np.ndarray, np.ndarray]:
    """Associated Legendre functions P and (1 - x^2) dP/dx at x = sine.

    Both (order, lat, degree), degree and order below `num_degrees`, with the integral of P^2
    over x equal to 1 and no Condon-Shortley sign.

    e(l, m) = sqrt((l^2 - m^2) / (4 l^2 - 1)):
    x P(l, m) = e(l + 1, m) P(l + 1, m) + e(l, m) P(l - 1, m),
    (1 - x^2) P'(l, m) = (l + 1) e(l, m) P(l - 1, m) - l e(l + 1, m) P(l + 1, m).
    """
    order = np.arange(num_degrees)[:, None]
    degree = np.arange(num_degrees + 1)
    e = np.sqrt(np.maximum(degree**2 - order**2, 0) / (4.0 * degree**2 - 1))  # (order, degree)
    p = np.zeros((num_degrees, len(sine), num_degrees + 1))
    p[0, :, 0] = math.sqrt(0.5)
    cosine = np.sqrt(1 - sine**2)
    for m in range(num_degrees):
        if m:
            p[m, :, m] = math.sqrt((2 * m + 1) / (2 * m)) * cosine * p[m - 1, :, m - 1]
        p[m, :, m + 1] = sine * p[m, :, m] / e[m, m + 1]
        for n in range(m + 2, num_degrees + 1):
            p[m, :, n] = (sine * p[m, :, n - 1] - e[m, n - 1] * p[m, :, n - 2]) / e[m, n]
    derivative = np.zeros((num_degrees, len(sine), num_degrees))
    for n in range(num_degrees):
        derivative[:, :, n] = -n * e[:, n + 1, None] * p[:, :, n + 1]
        if n:
            derivative[:, :, n] += (n + 1) * e[:, n, None] * p[:, :, n - 1]
    return np.ascontiguousarray(p[:, :, :num_degrees]), derivative
