"""BibTeX entries of the papers and data sets."""

from collections.abc import Iterable

from personax.values import require_one_of

BIBTEX = {
    "fallah2020": """@inproceedings{fallah2020,
  author = {Alireza Fallah and Aryan Mokhtari and Asuman Ozdaglar},
  title = {Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach},
  booktitle = {Advances in Neural Information Processing Systems},
  volume = {33},
  pages = {3557--3568},
  year = {2020}
}""",
    "jamali2025": """@misc{jamali2025,
  author = {Mohammad Vahid Jamali and Hamid Saber and Jung Hyun Bae},
  title = {A Generalized Meta Federated Learning Framework with Theoretical Convergence Guarantees},
  eprint = {2504.21327},
  archiveprefix = {arXiv},
  year = {2025}
}""",
    "deng2020": """@misc{deng2020,
  author = {Yuyang Deng and Mohammad Mahdi Kamani and Mehrdad Mahdavi},
  title = {Adaptive Personalized Federated Learning},
  eprint = {2003.13461},
  archiveprefix = {arXiv},
  year = {2020}
}""",
    "toghani2023": """@article{toghani2023,
  author = {Mohammad Taha Toghani and Soomin Lee and C{\\'e}sar A. Uribe},
  title = {{PersA-FL}: Personalized Asynchronous Federated Learning},
  journal = {Optimization Methods and Software},
  doi = {10.1080/10556788.2023.2280056},
  eprint = {2210.01176},
  archiveprefix = {arXiv},
  year = {2023}
}""",
    "mcmahan2017": """@inproceedings{mcmahan2017,
  author = {Brendan McMahan and Eider Moore and Daniel Ramage and Seth Hampson and Blaise {Ag{\\"u}era y Arcas}},
  title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  booktitle = {Proceedings of the 20th International Conference on Artificial Intelligence and Statistics},
  series = {Proceedings of Machine Learning Research},
  volume = {54},
  pages = {1273--1282},
  year = {2017}
}""",
    "li2020": """@inproceedings{li2020,
  author = {Tian Li and Anit Kumar Sahu and Manzil Zaheer and Maziar Sanjabi and Ameet Talwalkar and Virginia Smith},
  title = {Federated Optimization in Heterogeneous Networks},
  booktitle = {Proceedings of Machine Learning and Systems},
  volume = {2},
  pages = {429--450},
  year = {2020}
}""",
    "karimireddy2020": """@inproceedings{karimireddy2020,
  author = {Sai Praneeth Karimireddy and Satyen Kale and Mehryar Mohri and Sashank Reddi and Sebastian Stich and
            Ananda Theertha Suresh},
  title = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  booktitle = {Proceedings of the 37th International Conference on Machine Learning},
  series = {Proceedings of Machine Learning Research},
  volume = {119},
  pages = {5132--5143},
  year = {2020}
}""",
    "dinh2020": """@inproceedings{dinh2020,
  author = {Canh T. Dinh and Nguyen H. Tran and Tuan Dung Nguyen},
  title = {Personalized Federated Learning with {Moreau} Envelopes},
  booktitle = {Advances in Neural Information Processing Systems},
  volume = {33},
  pages = {21394--21405},
  year = {2020}
}""",
    "xie2019": """@misc{xie2019,
  author = {Cong Xie and Sanmi Koyejo and Indranil Gupta},
  title = {Asynchronous Federated Optimization},
  eprint = {1903.03934},
  archiveprefix = {arXiv},
  year = {2019}
}""",
    "nguyen2022": """@inproceedings{nguyen2022,
  author = {John Nguyen and Kshitiz Malik and Hongyuan Zhan and Ashkan Yousefpour and Mike Rabbat and Mani Malek and
            Dzmitry Huba},
  title = {Federated Learning with Buffered Asynchronous Aggregation},
  booktitle = {Proceedings of the 25th International Conference on Artificial Intelligence and Statistics},
  series = {Proceedings of Machine Learning Research},
  volume = {151},
  pages = {3581--3607},
  year = {2022}
}""",
    "khodak2019": """@inproceedings{khodak2019,
  author = {Mikhail Khodak and Maria-Florina Balcan and Ameet Talwalkar},
  title = {Adaptive Gradient-Based Meta-Learning Methods},
  booktitle = {Advances in Neural Information Processing Systems},
  volume = {32},
  pages = {5915--5926},
  year = {2019}
}""",
    "hsu2019": """@misc{hsu2019,
  author = {Tzu-Ming Harry Hsu and Hang Qi and Matthew Brown},
  title = {Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification},
  eprint = {1909.06335},
  archiveprefix = {arXiv},
  year = {2019}
}""",
    "yurochkin2019": """@inproceedings{yurochkin2019,
  author = {Mikhail Yurochkin and Mayank Agarwal and Soumya Ghosh and Kristjan Greenewald and Trong Nghia Hoang and
            Yasaman Khazaeni},
  title = {{Bayesian} Nonparametric Federated Learning of Neural Networks},
  booktitle = {Proceedings of the 36th International Conference on Machine Learning},
  series = {Proceedings of Machine Learning Research},
  volume = {97},
  pages = {7252--7261},
  year = {2019}
}""",
    "caldas2018": """@misc{caldas2018,
  author = {Sebastian Caldas and Sai Meher Karthik Duddu and Peter Wu and Tian Li and Jakub Kone{\\v{c}}n{\\'y} and
            H. Brendan McMahan and Virginia Smith and Ameet Talwalkar},
  title = {{LEAF}: A Benchmark for Federated Settings},
  eprint = {1812.01097},
  archiveprefix = {arXiv},
  year = {2018}
}""",
    "lecun1998": """@article{lecun1998,
  author = {Yann LeCun and L{\\'e}on Bottou and Yoshua Bengio and Patrick Haffner},
  title = {Gradient-Based Learning Applied to Document Recognition},
  journal = {Proceedings of the IEEE},
  volume = {86},
  number = {11},
  pages = {2278--2324},
  year = {1998}
}""",
    "krizhevsky2009": """@techreport{krizhevsky2009,
  author = {Alex Krizhevsky},
  title = {Learning Multiple Layers of Features from Tiny Images},
  institution = {University of Toronto},
  year = {2009}
}""",
    "alpaydin1998": """@misc{alpaydin1998,
  author = {E. Alpaydin and C. Kaynak},
  title = {Optical Recognition of Handwritten Digits},
  howpublished = {UCI Machine Learning Repository},
  doi = {10.24432/C50P49},
  year = {1998}
}""",
    "jax": """@software{jax,
  author = {James Bradbury and Roy Frostig and Peter Hawkins and Matthew James Johnson and Yash Katariya and
            Chris Leary and Dougal Maclaurin and George Necula and Adam Paszke and Jake VanderPlas and
            Skye Wanderman-Milne and Qiao Zhang},
  title = {{JAX}: Composable Transformations of {Python}+{NumPy} Programs},
  url = {http://github.com/jax-ml/jax},
  year = {2018}
}""",
}


def cite(keys: Iterable[str]) -> str:
    """The BibTeX entries of some keys, each once, in the order given. What is an entry already stays as it is.

    >>> print(cite(["xie2019", "deng2020", "xie2019"]).count("@"))
    2
    """
    wanted = list(dict.fromkeys(keys))
    for key in wanted:
        if not key.lstrip().startswith("@"):
            require_one_of("key", key, tuple(sorted(BIBTEX)))
    return "\n\n".join(BIBTEX.get(key, key.strip()) for key in wanted)
